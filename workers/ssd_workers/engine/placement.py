"""Where a model's weights go, and in what format: what is passed through to transformers."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from transformers.quantizers.auto import AutoQuantizationConfig

from ssd_integrations.errors import InvalidRequestError, MissingExtraError

DeviceMap = str | dict[str, int | str]


@dataclass(frozen=True)
class Placement:
    """One device, or a ``device_map`` over several; ``quantization`` as transformers takes it.

    Parameters:
      device: where the model goes if there is no map.
      device_map: a strategy's name, or module name -> device.
      quantization: fields of transformers' ``quantization_config``.
    """

    device: torch.device
    device_map: DeviceMap | None = None
    quantization: dict[str, Any] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether all weights go to one device as they are."""
        return self.device_map is None and self.quantization is None

    def loading_arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``from_pretrained``; none for a plain placement.

        Raises:
          InvalidRequestError: the quantization has an unknown method or field, or a bad value.
          MissingExtraError: a package is not installed.
        """
        if self.is_plain:
            return {}
        if find_spec("accelerate") is None:
            raise MissingExtraError.for_extra("device_map or quantization", "worker")
        arguments: dict[str, Any] = {"device_map": self.device_map or {"": self.device}}
        if self.quantization is not None:
            arguments["quantization_config"] = _quantization_config(self.quantization)
        return arguments


def missing_package(quantization: dict[str, Any], error: ImportError) -> MissingExtraError:
    """The error for a quantization method whose package is not installed."""
    return MissingExtraError(
        f"quantization={quantization} needs a package that is not installed: {error}",
        remedy="Install the package that the message names with pip, or drop quantization.",
    )


def _quantization_config(fields: dict[str, Any]) -> Any:
    try:
        config = AutoQuantizationConfig.from_dict(dict(fields))
    except ImportError as error:
        raise missing_package(fields, error) from error
    except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError) as error:
        raise InvalidRequestError(f"quantization={fields} is not usable: {error}") from error
    # The library leaves out what it does not know, and somebody who mistyped a field should know.
    unknown = [name for name in fields if not hasattr(config, name)]
    if unknown:
        raise InvalidRequestError(
            f"quantization={fields}: {type(config).__name__} has no field {unknown[0]!r}."
        )
    return config
