"""SVRG and QSVRG on a convex problem."""
