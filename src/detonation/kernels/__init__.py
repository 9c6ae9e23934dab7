"""Fast versions of single codec functions, under the same laws. Optional, and built on first use."""
