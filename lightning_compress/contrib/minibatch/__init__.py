"""Larger minibatches where the loss allows it: sizes are tried by short trainings that leave no trace.

Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent", Interspeech 2014.
"""
