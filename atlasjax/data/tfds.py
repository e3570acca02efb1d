"""Reads text features of TensorFlow Datasets on disk through their random-access data sources, without TensorFlow."""

import re
import sys

import numpy as np

from atlasjax import storage, trusted
from atlasjax.names import lookup

_NAMESPACE = re.compile(r"[^/:]+:(?!\d|\*|experimental_latest)")  # not a version
_CLASS = ("pythonClassName", "python_class_name", "type")  # keys of features.json whose value names a class


class TfdsDocuments:
    """One text feature of one split of a prepared dataset, one document per example.

    Args:
      name: "name", "name/config" or "name:version".
      split: "train", "train[:90%]", "train+test", …
      feature: top-level feature that holds a string.
      data_dir: the folder of prepared datasets. None means TFDS's own default.

    Raises:
      ImportError: tensorflow-datasets is not installed.
      FileNotFoundError: there is no such dataset, or it is not prepared in `data_dir`. Nothing is downloaded.
      ValueError: there is no such split or feature, the dataset is stored in a format without random access, or it would be read by
        code that TFDS would download or that its files name (`atlasjax.trust`).
    """

    block_offsets: np.ndarray | None = None
    blocks_in_memory: int = 1

    def __init__(self, name: str, split: str, feature: str, data_dir: str | None):
        try:
            import tensorflow_datasets as tfds
        except ImportError as error:
            raise ImportError("Data source 'tfds' needs tensorflow-datasets: pip install 'atlasjax[tfds]'.") from error
        where = repr(data_dir) if data_dir else "the default TFDS folder"
        if _NAMESPACE.match(name):
            raise ValueError(
                f"tfds_name is {name!r:.200}; TFDS would download code for a dataset with a namespace. Give the name of one "
                "that is prepared on disk."
            )
        for folder in tfds.core.utils.file_utils.list_data_dirs(given_data_dir=data_dir):
            _check_features(storage.expanded(folder) / re.split("[/:]", name)[0])
        try:
            builder = tfds.builder(name, data_dir=data_dir)
        except tfds.core.registered.DatasetNotFoundError:
            raise FileNotFoundError(f"There is no TFDS dataset {name!r} in {where}.") from None
        if not builder.is_prepared():
            raise FileNotFoundError(
                f"The TFDS dataset {name!r} is not prepared in {where}: {builder.data_path} is missing."
            )
        lookup("TFDS feature", feature, builder.info.features or {})
        try:
            self._source = builder.as_data_source(split=split)
        except NotImplementedError as error:
            raise ValueError(
                f"The TFDS dataset {name!r} is stored as {builder.info.file_format.value}, which has no random access; "
                f"prepare it with file_format='array_record'. ({error})"
            ) from None
        self._feature = feature
        if not len(self._source):
            raise ValueError(f"Split {split!r} of the TFDS dataset {name!r} is empty.")
        if not isinstance(self._source[0][feature], bytes | str):
            raise ValueError(
                f"Feature {feature!r} of the TFDS dataset {name!r} is {builder.info.features[feature]}; it should hold text."
            )

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int, /) -> str:
        text = self._source[index][self._feature]
        if isinstance(text, str):
            return text
        if not isinstance(text, bytes):
            raise ValueError(f"Feature {self._feature!r} of example {index} is {text!r:.80}; it should hold text.")
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"Feature {self._feature!r} of example {index} is not UTF-8 at byte {error.start}."
            ) from None


def _check_features(folder: storage.AnyPath) -> None:
    """Checks the classes that a prepared dataset names, whose modules TFDS imports.

    Raises:
      ValueError: one is neither of TFDS nor imported already, and its module is not trusted.
    """
    if not folder.is_dir():
        return
    found = folder.files() if isinstance(folder, storage.StorePath) else folder.rglob("features.json")
    for file in sorted(file for file in found if file.name == "features.json"):
        waiting = [storage.read_json(file)]
        while waiting:
            value = waiting.pop()
            waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
            for key in _CLASS if isinstance(value, dict) else ():
                module = str(value.get(key, "")).rpartition(".")[0]
                known = not module or module in sys.modules or module.startswith("tensorflow_datasets.")
                if not (known or trusted.is_trusted(module)):
                    raise ValueError(f"{str(file)!r}: {trusted.refusal(key, value[key], module)}")
