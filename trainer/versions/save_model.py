"""Save a published version as a Hugging Face model; an adapter is merged into its base."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from clawstream.runtime.digests import digest_of_model
from clawstream.runtime.weights.files import get_files
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.ids import parse_version
from clawstream.schemas.settings import Settings
from clawstream.trainer.model.files import auxiliary_files, load_masters, save_rounded
from clawstream.trainer.model.lora import CONFIG, base_of, merged
from clawstream.trainer.versions.directory import versions_in
from clawstream.trainer.versions.publish import files_of


def save_model(settings: Settings, version_id: str, out: Path) -> None:
    """Write a version to a new directory, in the dtypes of its model.

    Args:
        settings: `trainer.model_path` is the base of an adapter.
        version_id: its weights are still in `trainer.weights_uri`.
        out: must not exist.

    Raises:
        SettingsError: there is no such version, no base, or another one.
        InvalidCheckpoint, WeightsUnreadable: a file of the version is missing or altered.
        FileExistsError: `out` exists.
    """
    version, uri = parse_version(version_id), settings.weights_uri
    if version is None or version not in versions_in(uri, version.run_id):
        raise SettingsError(
            f"{uri} has no version {version_id}: older ones are deleted, see trainer.keep_versions"
        )
    if out.exists():
        raise FileExistsError(f"{out} exists")
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.absolute().parent) as tmp:
        directory = Path(tmp) / "model"
        directory.mkdir()
        for path in get_files(files_of(uri, version), Path(tmp)):
            shutil.copyfile(path, directory / path.name)
        if (directory / CONFIG).is_file():
            _merge(settings, version_id, directory, out)
        else:
            directory.rename(out)


def _merge(settings: Settings, version_id: str, directory: Path, out: Path) -> None:
    """Write the base of an adapter with the adapter merged into it."""
    base = settings.trainer.model_path
    if base is None:
        raise SettingsError("setting trainer.model_path: not set; an adapter needs its base")
    if digest_of_model(base) != base_of(directory):
        raise SettingsError(
            f"setting trainer.model_path: {base} is not the model that the adapter {version_id} "
            "was trained for: its weights are others"
        )
    out.mkdir(parents=True)
    model, dtypes = load_masters(base)
    save_rounded(merged(model, directory), out, dtypes)
    for name, content in auxiliary_files(base).items():
        if not (out / name).exists():
            (out / name).write_bytes(content)
