"""The command that shows runs in the browser."""

from typing import Annotated

import typer

from cavesson.errors import UserError

board_app = typer.Typer()


@board_app.command()
def board(
    runs: Annotated[list[str], typer.Argument(metavar="RUN…", help="Folders of runs, finished or in training.")],
    host: Annotated[
        str, typer.Option(help="Address to listen on. Addresses that other machines can reach need a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 = any free port.", min=0, max=65535)] = 6008,
    token: Annotated[
        str | None, typer.Option(help="Token that requests must have. Default: generated if needed.")
    ] = None,
    browser: Annotated[bool, typer.Option(help="Open the page.")] = True,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for runs that have not begun yet.")] = False,
) -> None:
    """Show runs in the browser: cavesson board RUN [RUN …]."""
    try:
        from cavesson.board.serve import serve

        serve(runs, host=host, port=port, token=token, browser=browser, wait=wait)
    except ModuleNotFoundError as error:
        if error.name not in ("filelock", "starlette", "uvicorn"):
            raise
        raise UserError(f"the board needs {error.name}; install it with: pip install 'cavesson[board]'") from None
