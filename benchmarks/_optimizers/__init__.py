"""Methods and what makes up for their errors, compared with Adam and SGD on ranks that are threads."""
