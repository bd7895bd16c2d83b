"""Classes by name: those of Lightning stand in two packages, of which only one may be installed."""


def kinds_of(given: object) -> set[str]:
    """Return the names of an object's class and of its bases."""
    return {each.__name__ for each in type(given).__mro__}
