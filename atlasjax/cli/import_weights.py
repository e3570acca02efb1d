"""`atlasjax import`."""

from atlasjax.cli.options.import_weights import ImportCommand
from atlasjax.interop import import_weights


def run(command: ImportCommand) -> None:
    """Runs the command. `atlasjax.cli.main` turns its errors into exit codes."""
    done = import_weights(
        command.path, command.run_dir, tokenizer=command.tokenizer, dtype=command.dtype, revision=command.revision
    )
    print(f"{command.run_dir}: {done.family}, {done.parameters:,} parameters from {done.tensors - done.kept} tensors")
    for note in done.notes:
        print(note)
