"""Many points on many processes or machines: what is there is reused, what fails does not sink the rest."""
