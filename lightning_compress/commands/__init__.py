"""The command line: ``lightning-compress advise``, ``doctor``, ``link``, ``compare`` and ``compressors``."""
