"""Few coefficients of a transform."""
