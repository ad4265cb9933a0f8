from __future__ import annotations

import pytest

from knockon.bench.comma_lists import parse_names, parse_numbers
from knockon.errors import Refused


def test_lists_are_read_with_commas_between() -> None:
    assert parse_numbers("batches", "1, 8,64") == (1, 8, 64)
    assert parse_names("base, A") == ("base", "A")


@pytest.mark.parametrize("text", ["1;8", "1,,8", "", "one"])
def test_what_is_no_list_of_numbers_is_refused_by_its_field(text: str) -> None:
    with pytest.raises(Refused, match=r"batches: .* numbers with commas between"):
        parse_numbers("batches", text)
