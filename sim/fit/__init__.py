"""What an engine's steps cost, learned from measured runs of it: the fit, what it cannot know, how wrong it is."""
