"""The kept list of all model types of the transformers library is what they do; docs/families.md is made of it."""

import warnings

import pytest

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install flexdilated[transformers]")

from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES  # noqa: E402

from tests.hub.transformers import survey  # noqa: E402

PARTS = 12

pytestmark = pytest.mark.filterwarnings("ignore")  # of the library, about configs and images


def is_kept_for_this_version() -> bool:
    return survey.version() == transformers.__version__


def test_nothing_kept_is_a_fault() -> None:
    faults = {name: finding.why for name, finding in survey.kept().items() if finding.result == "fault"}
    assert not faults
    assert {finding.result for finding in survey.kept().values()} <= set(survey.RESULTS)


def test_every_type_of_the_version_is_kept() -> None:
    if not is_kept_for_this_version():
        pytest.skip(f"the list is of version {survey.version()}")
    assert set(survey.kept()) == set(MODEL_MAPPING_NAMES)


@pytest.mark.slow
@pytest.mark.sweep  # test_families.py takes the families that the page lists
@pytest.mark.parametrize("part", range(PARTS))
def test_all_types_do_what_is_kept(part: int) -> None:
    if not is_kept_for_this_version():
        pytest.skip(f"the list is of version {survey.version()}")
    kept = survey.kept()
    with warnings.catch_warnings(action="ignore"):
        found = {name: survey.survey(name) for name in sorted(kept)[part::PARTS]}
    # An error of the library's own, of a model that was not built, may depend on what was built before.
    why = {name for name, finding in found.items() if finding.result != "not tried"}
    assert {name: finding.result for name, finding in found.items()} == {name: kept[name].result for name in found}
    assert {name: found[name] for name in why} == {name: kept[name] for name in why}
