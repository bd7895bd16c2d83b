"""What the user chose, checked."""
