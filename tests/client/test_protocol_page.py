"""docs/protocol.md says what the code does."""

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from offloadd.model.attach import ATTACH_MESSAGE_BYTES_MAX, AttachAnswer, AttachRequest
from offloadd.model.enums import EvictStatus, Reason, RestoreStatus
from offloadd.model.runtime import ADMIN_SOCKET, ATTACH_SOCKET, GRPC_SOCKET
from offloadd.model.status import CODE_OF
from offloadd.v1 import offload_pb2

from .daemon_double import Double

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()


def test_the_client_on_the_page_runs(double: Double, runtime_dir: Path) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", source, str(runtime_dir)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "session s-1\nrestored\n", "")


def test_every_code_status_reason_rpc_and_socket_is_on_the_page() -> None:
    for kind, code in CODE_OF.items():
        assert f"| {code} | {kind.__name__} |" in PAGE
    for status in [*EvictStatus, *RestoreStatus]:
        assert status.name == "UNSPECIFIED" or f"| `{status.name}` |" in PAGE
    for reason in Reason:
        assert reason.name == "NONE" or f"`{reason.name}`" in PAGE
    for method in offload_pb2.DESCRIPTOR.services_by_name["OffloadService"].methods:
        assert f"`{method.name}`" in PAGE
    assert all(name in PAGE for name in (ATTACH_SOCKET, GRPC_SOCKET, ADMIN_SOCKET, str(ATTACH_MESSAGE_BYTES_MAX)))


@pytest.mark.parametrize("kind", [AttachRequest, AttachAnswer])
def test_the_attach_messages_on_the_page_are_those_of_the_code(kind: object) -> None:
    tags = {member.__struct_config__.tag for member in kind.__args__}  # type: ignore[attr-defined]
    shown = [text.replace(":N}", ":4096}") for text in re.findall(r'\{"type":"[^`\n]*?\}', PAGE)]
    decoder = msgspec.json.Decoder(kind)  # type: ignore[var-annotated]
    seen = {type(decoder.decode(text)).__struct_config__.tag for text in shown if re.match(r'\{"type":"(\w+)"', text)[1] in tags}  # type: ignore[index]
    assert seen == tags


def test_the_byte_counts_of_the_exchange_on_the_page_are_right() -> None:
    for count, text in re.findall(r"^[→←] (\d+) bytes +(\{.*?\})", PAGE, re.MULTILINE):
        whole = re.sub(r"(\w+)…(\d+) digits…(\w+)", lambda m: "0" * int(m[2]), text)
        assert len(whole) == int(count), text
