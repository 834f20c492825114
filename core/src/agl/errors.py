"""Every error that agl raises, in one tree.

AglError
├── UsageError (ValueError)       you asked for something that cannot be
│   ├── ConfigError                 an unknown key or a bad value
│   ├── SelectionError              optimize= names an agent that was never seen
│   └── PluginError                 a misspelt hook, an unknown algorithm, a plugin that does not load
└── RunError (RuntimeError)       it went wrong while running
    ├── RewardError                 a reward that is missing or not a number
    │   └── NonFiniteReward           NaN or infinite
    ├── CaptureError                calls without tokens or logprobs; nothing to train on
    ├── BackendError                the engine died, or serves other weights than it should
    ├── ServerError                 the Lightning server refused a request or cannot be reached
    │   └── StaleAttempt              a newer attempt owns this rollout (HTTP 409)
    ├── NumericsError               a loss or gradient that is not finite
    └── StallError                  nothing moved for too long

A message says what broke, which value (``!r``) and what to do. A failed rollout is data, not an exception.
"""


class AglError(Exception):
    """The base of all errors of agl."""


class UsageError(AglError, ValueError):
    """You asked for something that cannot be."""


class ConfigError(UsageError):
    """An unknown configuration key, or a value that does not fit."""


class SelectionError(UsageError):
    """``optimize=`` names an agent that was never seen."""


class PluginError(UsageError):
    """A plugin or a name that plugins register is wrong."""


class RunError(AglError, RuntimeError):
    """It went wrong while running."""


class RewardError(RunError):
    """A reward is missing or not a number."""


class NonFiniteReward(RewardError):
    """A reward is NaN or infinite."""


class CaptureError(RunError):
    """A call lacks its tokens or logprobs, or there is nothing to train on."""


class BackendError(RunError):
    """The engine died, or serves other weights than it should."""


class ServerError(RunError):
    """The Lightning server refused a request, or cannot be reached."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class StaleAttempt(ServerError):
    """A newer attempt owns this rollout; what this one sends is not counted."""


class NumericsError(RunError):
    """A loss or gradient is not finite."""


class StallError(RunError):
    """Nothing moved for too long; the message says who waits for what."""
