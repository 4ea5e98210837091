"""The protocol: messages, frames with descriptors, peer checks; pure state apart from I/O."""
