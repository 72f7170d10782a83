"""Public path of `flexdilated.core.reference`: the definition of dilated attention."""

from flexdilated.core.reference import MaskMod as MaskMod
from flexdilated.core.reference import ScoreMod as ScoreMod
from flexdilated.core.reference import dilated_attention as dilated_attention
