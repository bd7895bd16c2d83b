"""Messages of earlier versions, which every later version must read: ``python -m tests.golden`` adds what is missing.

A message that is there is never written again: another format is another entry, and the reader must know both.
"""
