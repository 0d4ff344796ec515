"""`python -m clawstream.demo`."""

from __future__ import annotations

import typer

from clawstream.cli.common_options import Config, Overrides, plain_errors, settings_of
from clawstream.demo.main import main

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def demo(overrides: Overrides = None, config: Config = None) -> None:
    """Create a tiny model, let an agent use it, train it on the task, and report."""
    with plain_errors():
        main(settings_of(config, overrides, fresh=True))


app()
