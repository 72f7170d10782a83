"""Exact counts of what a pattern does and costs, in integers: no tensors, no device, any number of tokens."""

from flexdilated.analysis.choice import Choice as Choice
from flexdilated.analysis.choice import Choices as Choices
from flexdilated.analysis.choice import choose_pattern as choose_pattern
from flexdilated.analysis.coverage import count_uncovered as count_uncovered
from flexdilated.analysis.coverage import layers_to_cover as layers_to_cover
from flexdilated.analysis.coverage import missing_residues as missing_residues
from flexdilated.analysis.pairs import Balance as Balance
from flexdilated.analysis.pairs import count_multiplicities as count_multiplicities
from flexdilated.analysis.pairs import count_pairs as count_pairs
from flexdilated.analysis.reach import keys_seen as keys_seen
from flexdilated.analysis.reach import longest_reach as longest_reach
from flexdilated.analysis.reach import reachable as reachable
from flexdilated.analysis.report import Analysis as Analysis
from flexdilated.analysis.report import analyse as analyse
