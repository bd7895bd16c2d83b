"""Rows of numbers within one test: each costs less than a test of its own would."""

import functools
import inspect


def table(names, rows):
    """``pytest.mark.parametrize`` as a loop. A row that fails is named above its error.

    Args:
        names: of the arguments, with commas between.
        rows: their values; what is used up, as a random generator is, comes from a function that returns the rows.
    """
    names = [name.strip() for name in names.split(",")]

    def wrap(test):
        @functools.wraps(test)
        def each_row(**others):
            for row in rows() if callable(rows) else rows:
                given = dict(zip(names, row if len(names) > 1 else (row,), strict=True))
                try:
                    test(**others, **given)
                except Exception as error:
                    raise AssertionError(f"in the row {given}") from error

        signature = inspect.signature(test)
        others = [each for name, each in signature.parameters.items() if name not in names]
        each_row.__signature__ = signature.replace(parameters=others)
        return each_row

    return wrap
