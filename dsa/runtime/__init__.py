"""What every op and kernel shares on the host: the op's record, recorded calls, backends, compilation and its cache."""
