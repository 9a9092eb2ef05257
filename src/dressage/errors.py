"""What a user sees when something is wrong: one or two plain lines, exit code 2."""


class UserError(Exception):
    """A mistake the user can mend; the message names the place and the way out."""


class NonFiniteError(UserError):
    """A NaN or an infinity appeared while training; the message names the step and the tensor."""
