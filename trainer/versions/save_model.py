"""Save a published version as a Hugging Face model; an adapter is merged into its base."""

from __future__ import annotations

import shutil
from pathlib import Path

from runtime.digests import digest_of_model
from schemas.errors import SettingsError
from schemas.ids import parse_version
from schemas.settings import Settings
from trainer.model.files import auxiliary_files, load_masters, save_rounded
from trainer.model.lora import CONFIG, base_of, merged
from trainer.versions.directory import INFO, directory_of, verify


def save_model(settings: Settings, version_id: str, out: Path) -> None:
    """Write a version to a new directory, in the dtypes of its model.

    Args:
        settings: `trainer.model_path` is the base of an adapter.
        version_id: its weights are still in `trainer.weights_dir`.
        out: must not exist.

    Raises:
        SettingsError: there is no such version, no base, or another one.
        InvalidCheckpoint: a file of the version is altered.
        FileExistsError: `out` exists.
    """
    version = parse_version(version_id)
    directory = directory_of(settings.weights_dir, version) if version is not None else None
    if directory is None or not directory.is_dir():
        raise SettingsError(
            f"{settings.weights_dir} has no version {version_id}: older ones are deleted, see "
            "trainer.keep_versions"
        )
    verify(directory)
    if not (directory / CONFIG).is_file():
        shutil.copytree(directory, out, ignore=shutil.ignore_patterns(INFO))
        return
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
