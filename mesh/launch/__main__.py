"""`python -m mesh.launch`."""

from mesh.launch import main

if __name__ == "__main__":
    raise SystemExit(main())
