"""`atlasjax export`."""

from atlasjax.cli.options.export_weights import ExportCommand
from atlasjax.interop import export_weights


def run(command: ExportCommand) -> None:
    """Runs the command. `atlasjax.cli.main` turns its errors into exit codes."""
    done = export_weights(command.run_dir, command.path, step=command.step, ema=command.ema)
    print(f"{command.path}: {done.family}, {done.parameters:,} parameters in {done.tensors} tensors")
    if done.why:
        print(f"This is the form of this library, which `atlasjax import` reads: {done.why}")
