"""What the user chose, checked, and the settings in force during a run."""
