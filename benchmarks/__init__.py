"""What the claims about speed rest on; each module is a program."""
