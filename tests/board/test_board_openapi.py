"""The server against its own description: whatever the description allows has an answer that it tells of."""

import pytest
from board_helpers import HOST, ORIGIN, board_of, create_app
from hypothesis import HealthCheck, given, settings
from index_helpers import new_run, record

from cavesson.board.api import ENDPOINTS

schemathesis = pytest.importorskip("schemathesis", reason="pip install schemathesis")

from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    folder = new_run(tmp_path_factory.mktemp("openapi") / "run")
    record(folder, range(3))
    board = board_of(folder)
    yield create_app(board)
    board.scanner.stop()


@pytest.fixture(scope="module")
def described(app):
    return schemathesis.openapi.from_asgi("/api/openapi.json", app, headers={"host": HOST})


# Events never end.
ASKED = [endpoint for endpoint in ENDPOINTS if endpoint.path != "/api/events"]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("endpoint", ASKED, ids=lambda endpoint: f"{endpoint.method} {endpoint.path}")
def test_every_request_that_the_description_allows_is_answered(described, endpoint):
    operation = described[endpoint.path][endpoint.method]

    # A query of SQL starts a process.
    @settings(
        max_examples=4 if endpoint.path.endswith("/sql") else 25, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(operation.as_strategy())
    def ask(case):
        # Most texts name no run, and most numbers no rollout: those that do are asked about as well.
        if len(case.path_parameters.get("run", "")) % 2:
            case.path_parameters["run"] = "run"
        for name, count in (("step", 4), ("sample", 8)):
            if name in case.path_parameters and case.path_parameters[name] % 2:
                case.path_parameters[name] //= 2
                case.path_parameters[name] %= count
        answer = case.call(headers={"host": HOST, **ORIGIN})
        case.validate_response(answer, checks=CHECKS)
        if answer.status_code >= 400:
            error = answer.json()
            assert list(error) == ["error"] and "\n" not in error["error"]

    ask()
