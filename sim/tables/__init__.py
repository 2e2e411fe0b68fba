"""Step costs of deployments from the measured kernel tables of `aiconfigurator-core`, as profiles.

`find` has the one of a deployment: shipped, kept from before, or built now. `handle` asks the package, in the words of
`modes` and with a model of `models`; `build` makes a profile of what it answers, and `compare` holds a profile against
answers that it was not made of.
"""
