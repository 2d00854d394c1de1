"""Which tokens a pass computes, and where their keys are."""
