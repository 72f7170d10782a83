"""`flexdilated tune`: check and time the backends on a GPU, and keep for `backend="auto"` what is right and faster."""

from flexdilated.tuning.run import Tuning as Tuning
from flexdilated.tuning.run import tune as tune
