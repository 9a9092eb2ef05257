"""The command that shows runs in the browser."""

from typing import Annotated

import typer

from cavesson.cli.record import AllowRemote
from cavesson.errors import UserError

board_app = typer.Typer()


@board_app.command()
def board(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN…", help="Runs, finished or in training, and folders of runs.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 = any free port.", min=0, max=65535)] = 6008,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="CAVESSON_BOARD_TOKEN", help="Token that requests must have. Default: a new one at every start."
        ),
    ] = None,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Let every user of this machine read the runs, without a token.")
    ] = False,
    browser: Annotated[bool, typer.Option(help="Open the page.")] = True,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for runs that have not begun yet.")] = False,
    allow_remote: AllowRemote = False,
) -> None:
    """Show runs in the browser: cavesson board RUN [RUN …]."""
    if no_token and token is not None:
        raise UserError("give only one of --token, --no-token")
    if token == "":
        raise UserError("the token is empty: give another with --token, or leave it out")
    given = None if no_token else token or ""
    try:
        from cavesson.board.serve import serve

        serve(
            runs,
            host=host,
            port=port,
            token=given,
            browser=browser,
            wait=wait,
            allow_remote=allow_remote,
        )
    except ModuleNotFoundError as error:
        if error.name not in ("filelock", "starlette", "uvicorn"):
            raise
        raise UserError(f"the board needs {error.name}; install it with: pip install 'cavesson[board]'") from None
