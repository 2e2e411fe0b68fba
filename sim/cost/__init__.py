"""Cost models, which predict the duration of a step; `kinds` has the table of them."""
