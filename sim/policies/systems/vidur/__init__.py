"""Three schedulers as Vidur simulates them."""
