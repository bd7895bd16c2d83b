"""Training without waiting, as it is documented; ``contrib.asynchronous`` has the code."""
