"""Jaxprs and compiled programs: rewritten before they are lowered, read afterwards."""
