"""The small operations of a decoder step, a kernel each, beside the plain twins they must equal."""
