"""What a webhook may be and how a call to it is signed: rules that the API and the courier share. No I/O."""

from webhooks.addresses import Policy, Refused, Target, host_of
from webhooks.signing import new_secret, signature

__all__ = ["Policy", "Refused", "Target", "host_of", "new_secret", "signature"]
