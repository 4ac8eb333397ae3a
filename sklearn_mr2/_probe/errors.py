"""What the user can put right, told apart from faults of the program."""


class InputError(Exception):
    """The job cannot be done with this input; the message is one line with the cure."""
