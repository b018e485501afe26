"""How rows of results are printed."""

import pytest

from tilewright.cli.bench import print_rows


def test_rows_with_many_fields_are_columns(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows([{"shape": "small", "kernels": {"linear": "1"}, "seconds": seconds} for seconds in (1.5, 2.5)], False)
    lines = capsys.readouterr().out.splitlines()
    assert any("small" in line and "1.5" in line for line in lines)
    print_rows([{f"field_{at}": seconds + at for at in range(30)} for seconds in (1000, 2000)], False)
    lines = capsys.readouterr().out.splitlines()
    assert any("field_29" in line and "1029" in line and "2029" in line for line in lines)
    assert "kernels" not in "".join(lines)
