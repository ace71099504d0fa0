//! A dense row-major f32 matrix.

/// A dense matrix, row-major, f32.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    rows: usize,
    cols: usize,
    data: Vec<f32>,
}

impl Matrix {
    /// A `rows x cols` matrix of zeros.
    pub fn zeros(rows: usize, cols: usize) -> Self {
        Self::from_vec(rows, cols, vec![0.0; rows * cols])
    }

    /// Takes row-major data.
    ///
    /// # Panics
    /// If `data.len() != rows * cols`: a programming error, never a property of a file.
    pub fn from_vec(rows: usize, cols: usize, data: Vec<f32>) -> Self {
        assert_eq!(data.len(), rows * cols, "matrix data does not fill {rows} x {cols}");
        Self { rows, cols, data }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    pub fn data(&self) -> &[f32] {
        &self.data
    }

    pub fn data_mut(&mut self) -> &mut [f32] {
        &mut self.data
    }

    pub fn into_vec(self) -> Vec<f32> {
        self.data
    }

    pub fn row(&self, i: usize) -> &[f32] {
        &self.data[i * self.cols..(i + 1) * self.cols]
    }

    pub fn row_mut(&mut self, i: usize) -> &mut [f32] {
        &mut self.data[i * self.cols..(i + 1) * self.cols]
    }

    pub fn get(&self, i: usize, j: usize) -> f32 {
        self.data[i * self.cols + j]
    }

    pub fn set(&mut self, i: usize, j: usize, value: f32) {
        self.data[i * self.cols + j] = value;
    }

    /// The transpose, blocked so that both sides stay in cache.
    pub fn transpose(&self) -> Self {
        const BLOCK: usize = 32;
        let mut out = Self::zeros(self.cols, self.rows);
        for i0 in (0..self.rows).step_by(BLOCK) {
            for j0 in (0..self.cols).step_by(BLOCK) {
                for i in i0..(i0 + BLOCK).min(self.rows) {
                    for j in j0..(j0 + BLOCK).min(self.cols) {
                        out.data[j * self.rows + i] = self.data[i * self.cols + j];
                    }
                }
            }
        }
        out
    }

    /// The matrix with zero rows and columns appended up to `rows x cols`.
    pub fn padded(self, rows: usize, cols: usize) -> Self {
        if (rows, cols) == (self.rows, self.cols) {
            return self;
        }
        assert!(rows >= self.rows && cols >= self.cols, "padding cannot shrink a matrix");
        let mut out = Self::zeros(rows, cols);
        for i in 0..self.rows {
            out.row_mut(i)[..self.cols].copy_from_slice(self.row(i));
        }
        out
    }

    /// The upper-left `rows x cols` part.
    pub fn cropped(self, rows: usize, cols: usize) -> Self {
        if (rows, cols) == (self.rows, self.cols) {
            return self;
        }
        let mut data = Vec::with_capacity(rows * cols);
        for i in 0..rows {
            data.extend_from_slice(&self.row(i)[..cols]);
        }
        Self::from_vec(rows, cols, data)
    }

    /// The mean of the diagonal of a square matrix, summed in f64.
    pub fn diagonal_mean(&self) -> f64 {
        self.diagonal().map(f64::from).sum::<f64>() / self.rows as f64
    }

    pub fn diagonal(&self) -> impl Iterator<Item = f32> + '_ {
        (0..self.rows).map(|i| self.get(i, i))
    }

    pub fn add_to_diagonal(&mut self, value: f32) {
        for i in 0..self.rows {
            self.data[i * self.cols + i] += value;
        }
    }
}
