"""Base class and types of the pydantic models of requests, and messages of their errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from graft.native.errors import short_repr
from graft.tools.serve.errors import ApiError

#: Type of the pydantic errors that `rule_error` returns. Their message says what is wrong.
_RULE = "rule"
_UNKNOWN_KEY = "unknown_key"
#: Maps pydantic's error types to a description of the values that are allowed.
_ALLOWED = {
    "bool_type": "true or false",
    "string_type": "a string",
    "string_too_short": "a non-empty string",
    "string_unicode": "valid Unicode text",
    "dict_type": "an object",
    "model_type": "an object",
    "list_type": "a list",
}


class Fields(BaseModel):
    """An object in a request. A value of null counts as absent.

    For a value that breaks a rule, a validator raises `rule_error`. `read_fields` converts this
    error to an `ApiError` whose message names the field, the rule and the value. A validator that
    needs a message of another form raises `ApiError` itself, which pydantic does not catch.
    pydantic does not check values of type ``Any``; other code does.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _select(cls, given: Any) -> Any:
        """Remove keys whose value is null. If a key is unknown, raise an error that names it."""
        if not isinstance(given, dict):
            return given
        present = {key: value for key, value in given.items() if value is not None}
        if cls.model_config.get("extra") == "forbid":
            for key in present:
                if key not in cls.model_fields:
                    # pydantic cannot store a text with lone surrogates.
                    name = key.encode("utf-8", "surrogatepass")
                    raise PydanticCustomError(_UNKNOWN_KEY, "unknown key", {"key": name})
        return present


FieldsT = TypeVar("FieldsT", bound=Fields)


def rule_error(rule: str) -> PydanticCustomError:
    """Return the error of a validator for a value that breaks a rule such as "must be a number"."""
    return PydanticCustomError(_RULE, "rule", {"rule": rule})


def only(supported: Any, advice: str = "") -> AfterValidator:
    """Return a validator for a field that may only have the value `supported`.

    `advice` says in the error message which field to use instead.
    """

    def check(value: Any) -> Any:
        if value != supported or isinstance(value, bool) != isinstance(supported, bool):
            raise rule_error(f"can only be {supported!r}{advice and f' ({advice})'}")
        return value

    return AfterValidator(check)


def read_fields(
    model: type[FieldsT], given: Mapping[str, Any], served: str | None = None
) -> FieldsT:
    """Validate the fields `given` of a request and return them as an instance of `model`.

    Raise ApiError if a field is unknown or invalid. `served` is the name of the language model
    that the server runs. If the request asks for another one, the error has status 404. If `served`
    is None, the name of the language model is not checked.
    """
    try:
        body = model.model_validate(given)
    except ValidationError as error:
        raise _to_api_error(model, error.errors(include_url=False)[0]) from error
    name = given.get("model")
    if served is not None and name is not None and name != served:
        raise ApiError(
            f"there is no model {short_repr(name)}, only {served!r}",
            404,
            param="model",
            code="model_not_found",
        )
    return body


def _to_api_error(model: type[Fields], error: ErrorDetails) -> ApiError:
    """Convert a validation error of pydantic to an error that names the value and its path."""
    place = error["loc"]
    path = ""
    for part in place:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    path = path.removeprefix(".")
    param = str(place[0]) if place else None
    kind = error["type"]
    context = error.get("ctx", {})
    if kind == _UNKNOWN_KEY:
        key = context["key"].decode("utf-8", "surrogatepass")
        what = f"the field {short_repr(key)} is"
        if place:
            what = f"{path} has the key {short_repr(key)}, which is"
        return ApiError(f"{what} unknown, or not supported", param=param or key)
    if kind == "missing":
        return ApiError(f"{path} is missing", param=param)
    if kind == _RULE:
        rule = context["rule"]
    elif kind == "literal_error":
        rule = "must be " + context["expected"].replace(" or ", ", ").replace("'", "")
    elif kind in _ALLOWED:
        rule = f"must be {_ALLOWED[kind]}"
    else:  # not an integer, or outside the range that the metadata of the field gives
        limits = model.model_fields[str(place[0])].metadata
        [low] = [limit.ge for limit in limits if hasattr(limit, "ge")]
        [high] = [limit.le for limit in limits if hasattr(limit, "le")]
        rule = f"must be an integer from {low} to {high}"
    return ApiError(f"{path} {rule}, got {short_repr(error['input'])}", param=param)
