"""Chats with tools."""
