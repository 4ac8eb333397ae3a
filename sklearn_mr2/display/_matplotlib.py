"""matplotlib, imported when something is drawn and not before."""

from types import ModuleType


def import_pyplot(caller: str) -> ModuleType:
    """Import ``matplotlib.pyplot``, or say how to install it."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            f"{caller} needs matplotlib; install it with pip install 'sklearn-mr2[plot]'."
        ) from error
    return plt
