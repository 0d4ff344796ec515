"""Types that several bodies share."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
"""Ids; validation ends at the first wrong one."""
