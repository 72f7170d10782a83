"""Earlier path of `flexdilated.core.pattern`, so that pickles of patterns made with it still load."""

from flexdilated.core.pattern import DilatedPattern as DilatedPattern
