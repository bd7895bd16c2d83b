"""Training in which no rank waits for another: models are averaged by pairs, at any time. Nothing here needs Lightning.

Lian, Zhang, Zhang, Liu, "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018, arXiv 1710.06952.
"""
