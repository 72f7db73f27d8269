"""Generated code and hand-written enums agree with protos/."""

import sys
from enum import IntEnum
from pathlib import Path

import pytest
from grpc_tools import protoc  # type: ignore[import-untyped]

import offloadd
from offloadd.model import enums
from offloadd.v1 import offload_pb2

PROTOS = Path(__file__).parents[1] / "protos"
COMMITTED = Path(offloadd.__file__).parent / "v1"

#: Members that stand for the protocol's zero value.
ZERO = {enums.Tier: "ANY", enums.Path: "AUTO", enums.AckLevel: "DEFAULT", enums.Priority: "DEFAULT", enums.Reason: "NONE", enums.Way: "PLAIN"}


def test_the_generated_code_is_what_the_protos_generate(tmp_path: Path) -> None:
    sources = sorted(str(path) for path in (PROTOS / "offloadd" / "v1").glob("*.proto"))
    arguments = [f"-I{PROTOS}", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", f"--grpc_python_out={tmp_path}", *sources]
    # The package's own copy of google/protobuf/*.proto, which its command line adds by itself.
    well_known = Path(protoc.__file__).parent / "_proto"
    assert protoc.main([sys.executable, *arguments, f"-I{well_known}"]) == 0
    generated = {path.name: path.read_text() for path in (tmp_path / "offloadd" / "v1").iterdir()}
    committed = {path.name: path.read_text() for path in COMMITTED.iterdir() if path.is_file() and path.name != "__init__.py"}
    assert sorted(generated) == sorted(committed), "run `make proto`"
    assert [name for name in generated if generated[name] != committed[name]] == [], "run `make proto`"


ENUMS = sorted(
    (value for value in vars(enums).values() if isinstance(value, type) and issubclass(value, IntEnum) and value is not IntEnum), key=lambda ours: ours.__name__
)
#: Enums that no layer but rpc and client sees.
WIRE_ONLY = {"LookupMode"}


@pytest.mark.parametrize("ours", ENUMS, ids=lambda ours: ours.__name__)
def test_an_enum_has_the_names_and_numbers_of_the_protocol(ours: type[IntEnum]) -> None:
    theirs = offload_pb2.DESCRIPTOR.enum_types_by_name[ours.__name__]
    prefix = "".join(f"_{letter}" if letter.isupper() else letter.upper() for letter in theirs.name).removeprefix("_")
    expected = {value.name.removeprefix(f"{prefix}_"): value.number for value in theirs.values}
    assert expected.pop("UNSPECIFIED") == 0
    expected[ZERO.get(ours, "UNSPECIFIED")] = 0
    assert {member.name: member.value for member in ours} == expected


def test_the_model_and_the_protocol_have_the_same_enums() -> None:
    assert {ours.__name__ for ours in ENUMS} | WIRE_ONLY == set(offload_pb2.DESCRIPTOR.enum_types_by_name)
