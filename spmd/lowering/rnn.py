"""Recurrent networks, kept whole: per layer and direction one product over all steps and one `lax.scan`."""
