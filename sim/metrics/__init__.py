"""What is measured, each thing defined once, and what is asked of it."""
