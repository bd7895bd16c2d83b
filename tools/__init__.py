"""What makes pages of the documentation from the code."""
