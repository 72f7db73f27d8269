"""The list of mutants is up to date: `make mutants` judges them, and that takes minutes."""

from .__main__ import ROOT, load_mutants


def test_every_mutant_changes_one_place_and_names_tests_that_there_are() -> None:
    mutants = load_mutants()
    assert len(mutants) >= 25
    for mutant in mutants:
        text = (ROOT / mutant.file).read_text()
        assert mutant.changed(text) != text
        assert mutant.tests and all((ROOT / test.partition("::")[0]).exists() for test in mutant.tests), f"mutant {mutant.name} names tests that are gone"
